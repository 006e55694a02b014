"""What is a tokenizer to the exporter."""

from qtk.export.compressed_tensors.tokenizer import Tokenizer


def test_whatever_writes_its_files():
    class Own:
        def save_pretrained(self, folder):
            return folder

    assert isinstance(Own(), Tokenizer)
    assert not isinstance(object(), Tokenizer)
