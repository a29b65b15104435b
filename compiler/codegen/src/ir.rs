//! Walking MLIR.

use melior::ir::block::BlockLike;
use melior::ir::operation::OperationLike;
use melior::ir::{Module, OperationRef, RegionLike};

/// All operations below `root`, parents first. The references are valid until the IR is changed by a pass.
pub fn operations<'c, 'a>(root: OperationRef<'c, 'a>) -> Vec<OperationRef<'c, 'a>> {
    let mut found = Vec::new();
    collect(root, &mut found);
    found
}

fn collect<'c, 'a>(parent: OperationRef<'c, 'a>, found: &mut Vec<OperationRef<'c, 'a>>) {
    for region in parent.regions() {
        let mut block = region.first_block();
        while let Some(current) = block {
            let mut operation = current.first_operation();
            while let Some(op) = operation {
                found.push(op);
                collect(op, found);
                operation = op.next_in_block();
            }
            block = current.next_in_region();
        }
    }
}

/// The operations directly in a module.
pub fn top_level<'c, 'a>(module: &'a Module<'c>) -> Vec<OperationRef<'c, 'a>> {
    let mut found = Vec::new();
    let mut operation = module.body().first_operation();
    while let Some(op) = operation {
        found.push(op);
        operation = op.next_in_block();
    }
    found
}

/// An operation's name, `memref.alloc`.
pub fn name(op: OperationRef<'_, '_>) -> String {
    op.name().as_string_ref().as_str().unwrap_or_default().to_string()
}

/// The one `func.func` of a kernel's module.
pub fn function<'c, 'a>(module: &'a Module<'c>) -> Option<OperationRef<'c, 'a>> {
    top_level(module).into_iter().find(|op| name(*op) == "func.func")
}
