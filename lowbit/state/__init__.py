"""The state of parameters: layout, quantization, conversion, loading, memory."""
