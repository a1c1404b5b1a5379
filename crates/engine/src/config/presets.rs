//! Named model shapes, each a few lines of TOML in the words of `[model]`.

/// A named shape.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// As written in `model.preset`.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// Keys of `[model]`.
    pub toml: &'static str,
}

/// Every preset, small ones first within a family.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "quickstart",
        about: "a small Llama shape that learns something in two minutes on two cores",
        toml: "family = 'llama'\ndim = 256\nlayers = 6\nheads = 4\nkv_heads = 2\nffn_dim = 704\n\
               max_sequence_length = 256\ntie_embeddings = true",
    },
    Preset {
        name: "shakespeare-char",
        about: "the known small recipe for character-level Shakespeare",
        toml: "family = 'gpt2'\ndim = 128\nlayers = 4\nheads = 4\nmax_sequence_length = 64",
    },
    Preset {
        name: "gpt2-124m",
        about: "GPT-2 small",
        toml: "family = 'gpt2'\ndim = 768\nlayers = 12\nheads = 12\nvocab_size = 50257\nmax_sequence_length = 1024",
    },
    Preset {
        name: "gpt2-355m",
        about: "GPT-2 medium",
        toml: "family = 'gpt2'\ndim = 1024\nlayers = 24\nheads = 16\nvocab_size = 50257\nmax_sequence_length = 1024",
    },
    Preset {
        name: "gpt2-774m",
        about: "GPT-2 large",
        toml: "family = 'gpt2'\ndim = 1280\nlayers = 36\nheads = 20\nvocab_size = 50257\nmax_sequence_length = 1024",
    },
    Preset {
        name: "gpt2-1.5b",
        about: "GPT-2 XL",
        toml: "family = 'gpt2'\ndim = 1600\nlayers = 48\nheads = 25\nvocab_size = 50257\nmax_sequence_length = 1024",
    },
    Preset {
        name: "smollm2-135m",
        about: "SmolLM2 135M",
        toml: "family = 'llama'\ndim = 576\nlayers = 30\nheads = 9\nkv_heads = 3\nffn_dim = 1536\nvocab_size = 49152\n\
               max_sequence_length = 8192\nrope_theta = 100000.0\nnorm_eps = 1e-5\ntie_embeddings = true",
    },
    Preset {
        name: "qwen2.5-0.5b",
        about: "Qwen2.5 0.5B",
        toml: "family = 'llama'\ndim = 896\nlayers = 24\nheads = 14\nkv_heads = 2\nffn_dim = 4864\nvocab_size = 151936\n\
               max_sequence_length = 32768\nrope_theta = 1000000.0\nnorm_eps = 1e-6\ntie_embeddings = true\nqkv_bias = true",
    },
    Preset {
        name: "qwen3-0.6b",
        about: "Qwen3 0.6B",
        toml: "family = 'llama'\ndim = 1024\nlayers = 28\nheads = 16\nkv_heads = 8\nhead_dim = 128\nffn_dim = 3072\n\
               vocab_size = 151936\nmax_sequence_length = 40960\nrope_theta = 1000000.0\nnorm_eps = 1e-6\n\
               tie_embeddings = true\nqk_norm = true",
    },
    Preset {
        name: "llama-1b",
        about: "Llama 3.2 1B",
        toml: "family = 'llama'\ndim = 2048\nlayers = 16\nheads = 32\nkv_heads = 8\nffn_dim = 8192\nvocab_size = 128256\n\
               max_sequence_length = 131072\nrope_theta = 500000.0\nrope_scaling = 'llama3'\nrope_factor = 32.0\n\
               rope_original_length = 8192\nnorm_eps = 1e-5\ntie_embeddings = true",
    },
    Preset {
        name: "llama-8b",
        about: "Llama 3.1 8B",
        toml: "family = 'llama'\ndim = 4096\nlayers = 32\nheads = 32\nkv_heads = 8\nffn_dim = 14336\nvocab_size = 128256\n\
               max_sequence_length = 131072\nrope_theta = 500000.0\nrope_scaling = 'llama3'\nrope_factor = 8.0\n\
               rope_original_length = 8192\nnorm_eps = 1e-5",
    },
    Preset {
        name: "mistral-7b",
        about: "Mistral 7B v0.1",
        toml: "family = 'llama'\ndim = 4096\nlayers = 32\nheads = 32\nkv_heads = 8\nffn_dim = 14336\nvocab_size = 32000\n\
               max_sequence_length = 32768\nsliding_window = 4096\nnorm_eps = 1e-5",
    },
];

/// The preset of this name.
pub fn find(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}
