//! qcow2
