"""Text at the edges: tokeniser, chat template, incremental detokenisation, stop strings.

Everything here is a fold over the token log, so a restarted gateway rebuilds it by replay.
"""
