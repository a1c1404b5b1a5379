//! Dtypes, the memory pool, devices and the kernels.
