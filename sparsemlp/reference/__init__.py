"""Pure PyTorch references: the specification of every operator."""
