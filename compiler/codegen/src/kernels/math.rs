//! exp, tanh and log as polynomials.
