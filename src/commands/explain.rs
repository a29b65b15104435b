//! `paceline explain CODE`.

use crate::failure::Failure;

pub fn run(code: &str) -> Result<(), Failure> {
    let code = code.to_uppercase();
    match dsl::explain(&code) {
        Some(page) => {
            println!("{}", page.trim_end());
            Ok(())
        }
        None => Err(Failure::Usage(format!(
            "there is no diagnostic {code}: codes are printed in brackets, as in error[P0301]; docs/diagnostics lists them"
        ))),
    }
}
