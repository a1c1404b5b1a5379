//! Runs step programs: lanes, precision, optimizers, checkpoints, the trainer.
