//! The cache.

#[derive(Debug)]
pub struct ImageCache;
