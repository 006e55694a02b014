from qtk.capture.prepare_report import PrepareReport


def test_prints_what_happened_and_nothing_else():
    assert str(PrepareReport("export", True, True, elapsed_s=0.25)) == "captured by export in 0.2 s, dynamic batch"
    report = PrepareReport(
        "fx + export", True, False, reasons=("export: no",), swaps=(("dropout", 2),), unknown_ops=("aten.lstm.input",),
        eval_difference=0.0, train_difference=1e-7, opaque_parts=("cond",), notes=("a note",), elapsed_s=1.0,
    )
    assert str(report).splitlines() == [
        "captured by fx + export in 1.0 s, static batch",
        "2 × dropout recovered as modules",
        "max |prepared - original| in eval mode: 0",
        "max |prepared - original| in train mode: 1e-07",
        "not quantizable, no row in the op table: aten.lstm.input",
        "opaque, its inside is not quantized: cond",
        "export: no",
        "a note",
    ]
