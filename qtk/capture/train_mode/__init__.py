"""What differs between train mode and eval mode, kept through capture."""
