//! What a VM is on a host: its names, its document, its mark, its state and its
//! addresses. Pure functions over text and numbers; knows nobody.

pub mod addresses;
pub mod capabilities;
pub mod document;
pub mod host_xml;
pub mod instance_id;
pub mod mark;
pub mod names;
pub mod seen;
pub mod state;
pub mod volume;
mod xml;

pub use instance_id::InstanceId;
pub use mark::{Mark, Phase};
pub use names::VmName;
pub use xml::XmlFault;
