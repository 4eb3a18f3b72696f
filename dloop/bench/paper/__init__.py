"""The paper's tables, made of what `dloop bench`, `calibrate` and `train` left: pure functions from results to rows."""
