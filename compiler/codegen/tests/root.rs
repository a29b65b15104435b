//! The crate's one test binary: linking MLIR is heavy.
