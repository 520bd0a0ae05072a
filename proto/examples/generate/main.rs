//! Regenerates `src/gen` from the `.proto` files: `cargo run -p egress-provider-proto --example generate`.

use std::error::Error;
use std::path::Path;

mod codegen;

fn main() -> Result<(), Box<dyn Error>> {
    let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gen");
    std::fs::create_dir_all(&out)?;
    codegen::generate(&out)?;
    for name in codegen::GENERATED {
        println!("{}", out.join(name).display());
    }
    Ok(())
}
