//! Which kernels are matrix products that a library could compute, and that their operands are what the product says.

use crate::programs::flush;
use dsl::spec::{At, Dtype, Partition, Products, Recompute};
use model::build::{Build, Input, build};
use model::dims::Dims;
use model::graph::Elem;
use model::kernel::{OptimizerKind, UpdateRule};
use model::operands::Access;
use model::partition::partition;
use model::rules::Rules;
use model::target::{Chip, CpuClass, Target};

fn built(dtype: Dtype, products: Products, target: Target) -> Build {
    let dims = Dims { layers: 1, width: 24, heads: 3, context: 5, vocab: 11, microbatch: 2, dtype, tied: false };
    let program = &flush(1, 3, false);
    let partition = &partition(&dims, &At { value: Partition::Balanced, span: 0..0 }, 1).unwrap();
    let rules = &Rules::uniform(UpdateRule::plain(OptimizerKind::AdamW));
    build(&Input { dims, partition, fuse: true, rules, recompute: Recompute::None, products, program, target })
}

#[test]
fn products_say_what_their_kernels_operands_are() {
    for (dtype, products) in [(Dtype::F32, Products::F32), (Dtype::F32, Products::Tf32), (Dtype::Bf16, Products::F32)] {
        for target in [Target::Emulated, Target::Cuda(Chip::Sm90)] {
            let build = built(dtype, products, target);
            let mut found = Vec::new();
            for (kernel, entry) in build.kernels.iter().zip(&build.entries) {
                let Some(product) = entry.product else { continue };
                let operands = kernel.operands();
                let bytes: Vec<u64> = operands.iter().map(|operand| operand.bytes).collect();
                assert_eq!(bytes, product.operand_bytes(), "{}", kernel.name);
                let result = operands.last().unwrap();
                assert_eq!(result.access == Access::Update, product.adds, "{}", kernel.name);
                assert_eq!(result.elem == Elem::Bf16, product.rounded, "{}", kernel.name);
                assert_eq!(operands.len() == 4, product.bias, "{}", kernel.name);
                assert_eq!(operands[0].elem.bytes(), product.elements.bytes(), "{}", kernel.name);
                assert_eq!(kernel.scratch_bytes, 0, "{}", kernel.name);
                found.push(kernel.name.as_str());
            }
            let has = |part: &str| found.iter().any(|name| name.contains(part));
            // The head and what its input gradient is; sums of gradients; the bias of q, k and v, in f32 only.
            assert!(has("matmul_nn_10x11x24") && has("matmul_nt_10x24x11"), "{found:?}");
            assert!(has("matmul_tn_24x11x10_grad_store") && has("matmul_tn_24x11x10_grad_add"), "{found:?}");
            assert_eq!(has("matmul_nn_10x72x24_bias"), dtype == Dtype::F32, "{found:?}");
            assert!(!has("gelu") && !has("residual") && !has("adamw"), "{found:?}");
        }
    }
    let cpu = built(Dtype::F32, Products::F32, CpuClass::X86V4.into());
    assert!(cpu.entries.iter().all(|entry| entry.product.is_none()));
}
