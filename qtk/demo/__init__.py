"""Real handwritten digits and two small trained models: everything ``make demo`` needs, with no download."""
