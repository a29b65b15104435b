//! The command line's grammar.

use clap::{Args, Parser, Subcommand, ValueEnum};
use dsl::spec::{Spec, Weights};
use std::path::PathBuf;

/// A compiler for pipeline-parallel training: proves a schedule sound, compiles it, runs it.
#[derive(Parser)]
#[command(name = "paceline", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Prove a spec's properties: deadlock freedom, drift, memory, bubble
    Check(Check),
    /// Try every library schedule on a spec: bubble, memory, drift, delay, or why not
    Compare(Compare),
    /// Print the instruction grid
    Plan(Plan),
    /// Draw the schedule: a picture (.svg), a page (.html), or a trace for Perfetto (.json)
    Timeline(Timeline),
    /// Compile a spec to a bundle
    Compile(Compile),
    /// Show what a bundle holds
    Inspect(BundleArg),
    /// Check a bundle: checksums, memory map, instruction streams
    Verify(BundleArg),
    /// Measure on this machine's GPU which matrix products cuBLASLt computes faster, and freeze that in a new bundle
    Tune(Tune),
    /// Train: compile a spec (or take a bundle) and run it on text or tokens
    Run(Box<Run>),
    /// Put files into the canonical layout; comments and meaning stay
    Fmt(Fmt),
    /// Check a pipeline schedule in PyTorch's CSV format
    Import(Import),
    /// Write a spec's schedule in PyTorch's CSV format
    Export(Export),
    /// Print the page of a diagnostic code
    Explain {
        /// A code such as P0301
        code: String,
    },
    /// Check a GPU with a pack of `make gpu-pack`: every kernel, and trainings against the CPU's losses
    GpuCheck(GpuCheck),
    /// Write what the emulator says that a bundle's kernels do: a part of a pack
    #[command(hide = true)]
    GpuExpect(GpuExpect),
    /// Generate device code for requests on standard input: `compile` starts this itself
    #[cfg(feature = "codegen")]
    #[command(hide = true)]
    DeviceCode,
}

/// A spec and what may change it.
#[derive(Args, Clone)]
pub struct SpecArgs {
    /// The .pace file
    pub file: PathBuf,
    /// Override a key, e.g. --set pipeline.accumulate=8 (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// CPU class to plan and compile for: x86-64-v3 or x86-64-v4 (default: this machine's)
    #[arg(long, value_name = "NAME")]
    pub cpu: Option<String>,
    /// What to plan and compile for: cpu, cuda: and a chip such as cuda:sm_90, or cuda-emulated (default: cpu)
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Take the order of work from this table in PyTorch's CSV format; the file's schedule is not used
    #[arg(long, value_name = "FILE")]
    pub table: Option<PathBuf>,
    /// What `B` means in the table: new, the whole backward pass; old, the input gradient
    #[arg(long, value_enum, requires = "table")]
    pub dialect: Option<Dialect>,
    /// Times by stage are those of all stages of a rank together, as for a search.
    #[arg(skip)]
    pub cost_of_ranks: bool,
}

impl SpecArgs {
    /// With another schedule in the place of the file's own, and the policy for weights that it is made for where the file
    /// names one; everything else stays.
    pub fn with_schedule(&self, name: &str, spec: &Spec) -> SpecArgs {
        let args = SpecArgs { table: None, ..self.with_set(format!("pipeline.schedule={name}")) };
        if name == spec.schedule.name || spec.staleness.weights.span.is_empty() {
            return args;
        }
        let made_for = dsl::library::schedule(name).and_then(|s| s.weights).unwrap_or(Weights::Current);
        args.with_set(format!("staleness.weights={}", made_for.name()))
    }

    /// With one more override.
    pub fn with_set(&self, set: String) -> SpecArgs {
        let mut args = self.clone();
        args.sets.push(set);
        args
    }
}

#[derive(Args)]
pub struct Check {
    #[command(flatten)]
    pub spec: SpecArgs,
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Text,
    Json,
}

#[derive(Args)]
pub struct Compare {
    #[command(flatten)]
    pub spec: SpecArgs,
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

#[derive(Args)]
pub struct Plan {
    #[command(flatten)]
    pub spec: SpecArgs,
}

#[derive(Args)]
pub struct Timeline {
    #[command(flatten)]
    pub spec: SpecArgs,
    /// File to write: .svg, .html or .json
    #[arg(short, long)]
    pub output: PathBuf,
    /// A second schedule to put beside the file's own (.html, .json)
    #[arg(long, value_name = "SCHEDULE")]
    pub with: Option<String>,
    /// Updates to draw (default: enough to show the steady state)
    #[arg(long, value_name = "N")]
    pub updates: Option<u64>,
}

#[derive(Args)]
pub struct Compile {
    #[command(flatten)]
    pub spec: SpecArgs,
    /// Directory of the bundle (with --emit: a file; default: standard output)
    #[arg(short, long)]
    pub output: Option<PathBuf>,
    /// For a GPU: the assembler that makes machine code beside the PTX, or `none` (default: the one in CUDA_ROOT, CUDA_HOME, CUDA_PATH, on
    /// PATH, or of `make gpu-tools`, if there is one)
    #[arg(long, value_name = "PATH")]
    pub ptxas: Option<PathBuf>,
    /// Print one level of the lowering instead of making a bundle
    #[arg(long, value_enum)]
    pub emit: Option<Emit>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Emit {
    /// One module per stage: instructions and the kernels that they call
    Sched,
    /// The kernels as linalg on tensors
    Linalg,
    /// The kernels as LLVM IR
    Llvm,
    /// The kernels for a GPU in the gpu dialect
    Gpu,
    /// The kernels for a GPU as PTX
    Ptx,
}

#[derive(Args)]
pub struct Fmt {
    /// The .pace files
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Write nothing; name the files that are not in the layout and end with status 1
    #[arg(long)]
    pub check: bool,
}

#[derive(Args)]
pub struct Import {
    /// The .csv file: a row for each rank, no header
    pub table: PathBuf,
    /// What `B` means: new, the whole backward pass (I and W are its halves); old, the input gradient (`BW` is the whole)
    #[arg(long, value_enum)]
    pub dialect: Option<Dialect>,
    /// A .pace file that gives model, costs and bounds (its schedule is not used)
    #[arg(long, value_name = "FILE")]
    pub spec: Option<PathBuf>,
    /// Override a key of the spec, e.g. --set machine.memory="2 GiB" (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "spec")]
    pub sets: Vec<String>,
    /// CPU class to plan for: x86-64-v3 or x86-64-v4 (default: this machine's)
    #[arg(long, value_name = "NAME")]
    pub cpu: Option<String>,
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// What the letters of a table mean.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dialect {
    New,
    Old,
}

#[derive(Args)]
pub struct Export {
    #[command(flatten)]
    pub spec: SpecArgs,
    /// Write PyTorch's CSV (the only format)
    #[arg(long, required = true)]
    pub csv: bool,
    /// With sends and receives (PyTorch's compute_comms) instead of compute actions only
    #[arg(long)]
    pub comms: bool,
    /// File to write (default: standard output)
    #[arg(short, long)]
    pub output: Option<PathBuf>,
}

#[derive(Args)]
pub struct BundleArg {
    /// Directory that `compile` made
    pub bundle: PathBuf,
}

#[derive(Args)]
pub struct Tune {
    /// Bundle for a GPU; one that is tuned already is measured anew
    pub bundle: PathBuf,
    /// Directory for the tuned bundle
    #[arg(short, long)]
    pub output: PathBuf,
    /// Memory that a product may use beside its operands, in MiB
    #[arg(long = "workspace", value_name = "MIB", default_value_t = 32, value_parser = clap::value_parser!(u64).range(..1 << 20))]
    pub workspace_mib: u64,
    /// End when a product is not done after so long
    #[arg(long = "deadline", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub deadline_s: u64,
}

#[derive(Args)]
pub struct GpuCheck {
    /// Folder of the pack
    pub pack: PathBuf,
    /// End when a rank makes no progress for so long
    #[arg(long = "deadline", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub deadline_s: u64,
}

#[derive(Args)]
pub struct GpuExpect {
    /// Bundle for the emulator, on one rank
    pub bundle: PathBuf,
    /// File to write
    #[arg(short, long)]
    pub output: PathBuf,
}

#[derive(Args)]
pub struct Run {
    #[command(flatten)]
    pub spec: SpecArgs,
    /// Training data: text files as bytes, or .bin of u16/u32 tokens (repeatable; read in order)
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// Optimizer updates to make (default: the learning-rate schedule's total)
    #[arg(long, value_name = "N")]
    pub updates: Option<u64>,
    /// Seed of the initial weights and of the sampling
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Held-out data to evaluate on, at the start, at every boundary and at the end (repeatable)
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with = "holdout")]
    pub eval: Vec<PathBuf>,
    /// Keep this last fraction of the data for evaluation instead of training
    #[arg(long, value_name = "FRACTION")]
    pub holdout: Option<f64>,
    /// Write a JSON line per update and a summary to this file
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Save the weights at the end (safetensors)
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// On devices: end the run when a rank makes no progress for so long, and say what it waited for
    #[arg(long = "deadline", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub deadline_s: u64,
    /// Start from these weights instead of fresh ones (safetensors; any partition)
    #[arg(long, value_name = "FILE")]
    pub load: Option<PathBuf>,
}
