//! Turns the `.proto` files into Rust and a descriptor set, without `protoc`.
//!
//! Shared by the example that writes the files and the test that says whether they are current.

use std::error::Error;
use std::path::Path;

use prost::Message as _;

/// The names of the generated files, in `src/gen`.
pub(crate) const GENERATED: [&str; 2] = ["egressproxies.provider.v1.rs", "descriptor.bin"];

const SOURCES: [&str; 3] =
    ["egressproxies/provider/v1/provider.proto", "egressproxies/provider/v1/image.proto", "egressproxies/provider/v1/error.proto"];

/// Messages that hold user-data or an image URL; `src/redact.rs` writes their `Debug`.
const SECRET_HOLDERS: [&str; 6] = [
    ".egressproxies.provider.v1.CloudInit",
    ".egressproxies.provider.v1.Placement",
    ".egressproxies.provider.v1.PrepareImageRequest",
    ".egressproxies.provider.v1.GetImageRequest",
    ".egressproxies.provider.v1.WatchImageRequest",
    ".egressproxies.provider.v1.EvictImageRequest",
];

/// Writes every file of [`GENERATED`] into `out`.
pub(crate) fn generate(out: &Path) -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut compiler = protox::Compiler::new([root])?;
    compiler.include_imports(true).include_source_info(true).open_files(SOURCES)?;

    // Encoded by protox and not by prost: the latter drops the options that it does not know, and
    // debug_redact is one of them.
    let descriptor = compiler.encode_file_descriptor_set();
    std::fs::write(out.join("descriptor.bin"), &descriptor)?;

    let files = tonic_prost_build::FileDescriptorSet::decode(descriptor.as_slice())?;
    tonic_prost_build::configure().out_dir(out).emit_rerun_if_changed(false).skip_debug(SECRET_HOLDERS).compile_fds(files)?;
    Ok(())
}
