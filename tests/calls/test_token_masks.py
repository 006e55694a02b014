import pytest
import torch

from qtk.calls.token_masks import TokenMasks
from qtk.errors import CalibrationError


def masks(names, *shapes, inputs=None):
    inputs = [None] * len(names) if inputs is None else inputs
    return TokenMasks(tuple(torch.ones(shape, dtype=torch.bool) for shape in shapes), tuple(names), tuple(inputs))


def test_axes_tell_the_sides_apart():
    sides = masks(["encoded", "decoded"], (2, 5), (2, 3))
    assert [sides.mask_of("x", torch.Size(axes)) for axes in ((2, 5), (2, 3), (2, 4))] == [0, 1, None]


@pytest.mark.parametrize(("names", "inputs"), [
    (["attention_mask", "decoder_attention_mask"], ["input_ids", "decoder_input_ids"]),
    (["decoder_attention_mask", "attention_mask"], ["decoder_inputs_embeds", "position_ids"]),
    (["src_mask", "tgt_mask"], ["src", "tgt"]),
])
def test_names_tell_them_apart_where_axes_do_not(names, inputs):
    sides = masks(names, (2, 5), (2, 5))
    assert [sides.mask_of(name, torch.Size((2, 5))) for name in (*inputs, *names)] == [0, 1, 0, 1]


def test_what_is_said_counts_and_must_fit():
    sides = masks(["one", "other"], (2, 5), (2, 5), inputs=[frozenset(["b"]), frozenset(["a"])])
    assert [sides.mask_of(name, torch.Size((2, 5))) for name in ("a", "b", "c")] == [1, 0, None]
    with pytest.raises(CalibrationError, match=r"a begins with the axes \[2, 4\], its mask other with \[2, 5\]"):
        sides.mask_of("a", torch.Size((2, 4)))


def test_names_that_do_not_tell_are_refused_with_what_to_write():
    with pytest.raises(CalibrationError, match=r"x has the axes of the masks m1 and m2; .*valid=\{'m1': \[...\], 'm2'"):
        masks(["m1", "m2"], (2, 5), (2, 5)).mask_of("x", torch.Size((2, 5)))


def test_samples_are_cut_out_of_all():
    part = masks(["one", "other"], (4, 5), (4, 3)).of_samples(1, 4)
    assert (part.samples, [mask.shape for mask in part.masks]) == (3, [(3, 5), (3, 3)])
