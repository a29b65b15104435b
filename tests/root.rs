//! Integration tests of the command line: one binary, a module per topic.

mod tidy;
