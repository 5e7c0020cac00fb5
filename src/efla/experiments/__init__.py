"""The paper's experiments: each folder holds the data, model, config, runs, claims, figures and report section of one."""
