//! An MLIR context with everything loaded, whose diagnostics go to a string instead of stderr.

use crate::error::CodegenError;
use crate::sched;
use melior::Context;
use melior::diagnostic::Diagnostic;
use melior::dialect::DialectRegistry;
use melior::ir::Module;
use melior::pass::PassManager;
use melior::utility::{
    load_irdl_dialects, parse_pass_pipeline, register_all_dialects, register_all_llvm_translations, register_all_passes,
};
use std::sync::{Arc, Mutex, MutexGuard};

/// Longest diagnostic text that is kept.
const MESSAGE_BYTES_MAX: usize = 16 * 1024;

/// A context for one thread. IR that is parsed in it borrows `mlir`.
pub struct CodegenContext {
    pub mlir: Context,
    report: Arc<Mutex<Report>>,
}

/// What MLIR said about the text that was parsed last.
#[derive(Default)]
struct Report {
    messages: String,
    /// Locations of what is derived from the text point into it.
    text: String,
}

impl Report {
    fn add(&mut self, diagnostic: &Diagnostic) {
        if self.messages.len() >= MESSAGE_BYTES_MAX {
            return;
        }
        let location = diagnostic.location().to_string();
        self.messages += &format!("{location}: {diagnostic}\n");
        if let Some(line) = line_number(&location).and_then(|n| self.text.lines().nth(n.checked_sub(1)?)) {
            self.messages += &format!("  | {}\n", line.trim());
        }
        for note in (0..diagnostic.note_count()).filter_map(|i| diagnostic.note(i).ok()) {
            self.messages += &format!("  note: {note}\n");
        }
    }
}

/// The line in a location such as `loc("-":12:3)`.
fn line_number(location: &str) -> Option<usize> {
    location.split_once("\"-\":")?.1.split(':').next()?.parse().ok()
}

impl CodegenContext {
    /// Loads all dialects, ours (`sched`) too.
    pub fn new() -> Result<Self, CodegenError> {
        register_all_passes();
        let registry = DialectRegistry::new();
        register_all_dialects(&registry);
        let mlir = Context::new_with_registry(&registry, false);
        mlir.load_all_available_dialects();
        register_all_llvm_translations(&mlir);
        let report = Arc::new(Mutex::new(Report::default()));
        let handled = Arc::clone(&report);
        mlir.attach_diagnostic_handler(move |diagnostic| {
            lock(&handled).add(&diagnostic);
            true
        });
        let context = Self { mlir, report };
        context.load_sched()?;
        Ok(context)
    }

    /// A dialect may be loaded once per context, so this is part of `new`.
    fn load_sched(&self) -> Result<(), CodegenError> {
        let dialect = self.parse("sched dialect", "parse", sched::DIALECT)?;
        if load_irdl_dialects(&dialect) { Ok(()) } else { Err(self.error("sched dialect", "load")) }
    }

    /// Parses a module. Diagnostics from before are forgotten.
    pub fn parse(&self, subject: &str, step: &'static str, text: &str) -> Result<Module<'_>, CodegenError> {
        *lock(&self.report) = Report { messages: String::new(), text: text.into() };
        Module::parse(&self.mlir, text).ok_or_else(|| self.error(subject, step))
    }

    /// Runs a pass pipeline in mlir-opt's notation.
    pub fn run(
        &self,
        subject: &str,
        step: &'static str,
        pipeline: &str,
        module: &mut Module,
    ) -> Result<(), CodegenError> {
        let manager = PassManager::new(&self.mlir);
        parse_pass_pipeline(manager.as_operation_pass_manager(), pipeline)
            .map_err(|e| CodegenError::new(subject, step, e.to_string()))?;
        manager.run(module).map_err(|_| self.error(subject, step))
    }

    /// An error with the diagnostics so far.
    pub fn error(&self, subject: &str, step: &'static str) -> CodegenError {
        CodegenError::new(subject, step, std::mem::take(&mut lock(&self.report).messages))
    }
}

fn lock(report: &Mutex<Report>) -> MutexGuard<'_, Report> {
    report.lock().expect("nothing panics while it holds the lock")
}
