//! url policy
#[derive(Debug, Clone, PartialEq)]
pub struct UrlPolicy;
