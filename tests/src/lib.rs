//! Harness for tests against the lab.
