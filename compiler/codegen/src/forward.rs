//! Forwards the write of a register tile to the read that follows it.

use crate::context::CodegenContext;
use melior::ir::Module;

pub fn tile_writes(_context: &CodegenContext, _module: &Module) {}
