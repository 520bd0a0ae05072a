//! observed
