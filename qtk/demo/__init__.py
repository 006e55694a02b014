"""Real handwritten digits and four small trained models: everything ``make demo`` needs, with no download."""
