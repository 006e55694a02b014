"""Weight algorithms (GPTQ, AdaRound …) on tensors alone, without graphs or modules."""
