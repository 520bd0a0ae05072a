//! The tonic side.
