//! Layers, units and model families; Hugging Face configs and weights.
