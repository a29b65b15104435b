//! The two calls that a driver makes, on a resolved specification.

use crate::build::{Build, Input, build};
use crate::dims::{Dims, check_sizes};
use crate::kernel::OptimizerKind;
use crate::limits::{Bounds, check_memory};
use crate::partition::partition;
use crate::target::CpuClass;
use artifact::stream::Program;
use dsl::diag::Diagnostic;
use dsl::spec::{Layer, Optimizer, Spec};

/// The layers of each of `stages` stages; none for a spec without a model.
///
/// # Errors
/// Sizes that are refused (`P0401`), or a partition that is (see [`partition`]).
pub fn layers(spec: &Spec, stages: u32) -> Result<Option<Vec<Vec<Layer>>>, Box<Diagnostic>> {
    let Some(model) = &spec.model else { return Ok(None) };
    let dims = check_sizes(model, &spec.pipeline.microbatch)?;
    partition(&dims, &spec.pipeline.partition, stages).map(Some)
}

/// Kernels, stage programs and memory of a spec with a model, and `P0410` to `P0412` where a bound on memory is exceeded. `layers`
/// comes from [`layers`], `program` has as many stages. None for a spec without a model.
pub fn build_spec(
    spec: &Spec,
    layers: &[Vec<Layer>],
    program: &Program,
    cpu: CpuClass,
) -> Option<(Build, Vec<Diagnostic>)> {
    let model = spec.model.as_ref()?;
    let input = Input {
        dims: Dims::new(model, spec.pipeline.microbatch.value),
        partition: layers,
        fuse: spec.pipeline.fuse.value,
        optimizer: match spec.optimizer.value {
            Optimizer::AdamW { .. } => OptimizerKind::AdamW,
            Optimizer::Sgd { .. } => OptimizerKind::Sgd,
        },
        program,
        cpu,
    };
    let built = build(&input);
    let bounds = Bounds { machine: spec.machine.memory.clone(), require: spec.require.memory.clone() };
    let found = check_memory(&input, &built, &bounds, &model.span);
    Some((built, found))
}
