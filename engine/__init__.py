"""The pure core of Estafet: messages, states and policies, without I/O, clock or randomness."""

__version__ = "0.1.0"
