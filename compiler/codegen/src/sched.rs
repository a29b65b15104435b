//! The `sched` dialect.

/// The dialect, in IRDL.
pub const DIALECT: &str = r#"
irdl.dialect @sched {
}
"#;
