//! report
#[derive(Debug)]
pub struct ConfigReport;
