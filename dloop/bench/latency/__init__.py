"""What `dloop latency` measures: forwards, drafting stages and whole rounds of named shapes with random weights."""
