//! `paceline explain CODE`.

use crate::failure::Failure;
use crate::output;

pub fn run(code: &str) -> Result<(), Failure> {
    let code = code.to_uppercase();
    match dsl::explain(&code) {
        Some(page) => output::write(&format!("{}\n", page.trim_end())),
        None => Err(Failure::Usage(format!(
            "there is no diagnostic {code}: codes are printed in brackets, as in error[P0301]; docs/diagnostics lists them"
        ))),
    }
}
