"""What the README shows, runs: every python block by itself, as pasted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.short_digits import digits_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = blocks(README, "python")


@pytest.mark.medium
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_block_runs_as_pasted(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    with digits_of(pytestconfig):
        exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), {"__name__": "__main__"})


def test_there_is_something_to_run() -> None:
    assert BLOCKS


QUESTIONS = {
    "What is a site, a scheme": "what is a site",
    "What if a module cannot be captured?": "what if a module cannot be captured",
    "Which weights are per channel?": "which weights are per channel",
    "How do I install the C++ kernels, from a wheel too?": "from a wheel too",
    "torchvision's detectors": "torchvision's detectors",
    "What does prepare_model do to my model?": "prepare_model",
    "How do I quantize a Llama to 4 bits for vLLM?": "llama in 4 bits for vllm",
    "Which bits does my runtime have?": "which bits does my runtime have",
    "How do I keep a layer in float": "keep a layer in float",
    "Is my calibration data enough?": "is my calibration data enough",
    "How do I train?": "how do i train",
    "How do I give it 4, 8 or 16 bits?": "4, 8 or 16 bits",
    "Which scheme": "which scheme",
    "When SmoothQuant?": "when do i want smoothquant",
    "Which tensor departs?": "which tensor departs",
    "Can a drop be promised": "a drop that is promised",
    "A model larger than memory?": "larger than memory",
    "Which multiplies int4 as integers": "which runtimes multiply int4 weights as integers",
    "How do I run it from the command line, without code": "from the command line",
    "Why is my file slower?": "why is my file slower",
    "How do I load the result in another process?": "load the result in another process",
    "What is not supported?": "what is not supported",
    "How do I measure perplexity?": "perplexity",
    "How do I quantize the KV cache, and what does it cost?": "kv cache",
    "Which layer loses most?": "which layer loses most",
    "Do all runtimes compute the same": "certificate of every runtime",
    "In CI?": "in ci",
    "How do I run on a GPU?": "on a gpu",
    "What happens to BatchNorm?": "what happens to batchnorm",
    "sequences of several lengths": "several lengths",
    "To GGUF?": "gguf",
    "Which ops are fused": "which ops are fused",
    "Which layers stay float, and why?": "why is this value in float",
    "How do I write my own YAML?": "my own yaml",
    "Set weights and activations apart?": "weights and activations apart",
    "Set or freeze a range": "set or freeze a range by hand",
    "Several inputs, sizes that change?": "several inputs, and axes that change",
    "Do I have outlier channels?": "do i have outlier channels",
    "How do I stop and resume?": "how do i stop and resume",
    "What do green, yellow, red mean?": "green, yellow and red",
    "How do I compare two exported folders": "compare two exported folders",
    "Core AI, TensorRT": "tensorrt",
    "for AIMET's converters": "aimet's converters",
    "(recipes)": "recipes",
    "for OpenVINO": "openvino",
    "Does it run W4A8?": "which runtimes multiply int4 weights as integers",
    "Which configuration keys exist?": "which configuration keys exist",
    "W8A8 of a language model?": "int8 weights and activations (w8a8)",
    "How do I save and load a simulation?": "or save it",
    "From torchao, ModelOpt, NNCF": "from torchao, modelopt, nncf or llm-compressor",
    "Padding?": "padding",
    "What without data?": "without data",
    "dynamic quantization": "dynamic quantization",
    "For onnxruntime-genai?": "onnx for onnxruntime-genai",
    "Experts?": "mixtures of experts",
    "pruned weights": "pruned weights",
    "With my own loss?": "with my own loss",
    "DDP, LoRA, hooks": "what trainers do",
    "ExecuTorch": "compilers lower",
    "LSTM or GRU on a stream": "runs on a stream",
    "segmenter": "segmenters",
    "Faster R-CNN": "torchvision's detectors",
}
"""What newcomers asked → what the heading that answers it says."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_leads_to_a_heading_with_its_words(question: str) -> None:
    (row,) = (line for line in README.splitlines() if question in line)
    reached = []
    for path, anchor in re.findall(r"\]\(([\w/.]+\.md)#([^)]+)\)", row):
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        reached += [each.lower() for each in headings
                    if re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") == anchor]
    assert any(QUESTIONS[question] in heading for heading in reached), reached


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 90
