//! What an image is, told from its first bytes; for qcow2, what its header says.
//!
//! An image comes from outside, and QEMU follows what its header names: a backing
//! file or an external data file would let an image read files of the host. So a
//! header is refused unless everything in it is known and harmless. Layout: QEMU's
//! `docs/interop/qcow2`. Pure; never panics, whatever the bytes are.

use std::fmt;

/// As much of an image as [`sniff`] ever looks at.
pub const HEAD: usize = 64 << 10;

/// Larger disks cannot be configured, so a larger one is a broken header.
const MAX_VIRTUAL_SIZE: u64 = 65_536 << 30;

const MAGIC: &[u8] = b"QFI\xfb";
const V2_HEADER: usize = 72;
const V3_HEADER: usize = 104;

/// Type of the header extension that names an external data file. QEMU heeds it only together with
/// the feature bit; another reader of the header may not.
const DATA_FILE_NAME: u32 = 0x4441_5441;
/// Type that ends the extensions.
const END: u32 = 0;

// incompatible features, by bit
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
// dirty (refcounts are rebuilt), compression type, extended L2 entries
const HARMLESS: u64 = 1 << 0 | 1 << 3 | 1 << 4;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sniffed {
    Qcow2(Header),
    /// Nothing that is known: taken as a raw disk.
    Raw,
    Other(Kind),
}

/// What else the bytes may be; named in the refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Empty,
    /// The magic of qcow2 and then too little.
    CutQcow2,
    Vmdk,
    Vdi,
    Vhdx,
    Vhd,
    Qed,
    Gzip,
    Xz,
    Zstd,
    Bzip2,
    Zip,
    Tar,
    Html,
    Xml,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "empty",
            Self::CutQcow2 => "a qcow2 image that ends within its header",
            Self::Vmdk => "a VMDK image",
            Self::Vdi => "a VirtualBox (VDI) image",
            Self::Vhdx => "a VHDX image",
            Self::Vhd => "a VHD image",
            Self::Qed => "a QED image",
            Self::Gzip => "gzip-compressed",
            Self::Xz => "xz-compressed",
            Self::Zstd => "zstd-compressed",
            Self::Bzip2 => "bzip2-compressed",
            Self::Zip => "a zip archive",
            Self::Tar => "a tar archive",
            Self::Html => "an HTML page",
            Self::Xml => "an XML document",
        })
    }
}

/// The fields of a qcow2 header that decide whether it may be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    pub version: u32,
    pub virtual_size: u64,
    pub cluster_bits: u32,
    pub backing_file_offset: u64,
    pub crypt_method: u32,
    pub incompatible: u64,
    pub compression: u8,
    pub extensions: Extensions,
}

/// What the header extensions say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extensions {
    Harmless,
    /// One names another file.
    DataFile,
    /// They go on where nobody has looked.
    OutOfSight,
}

/// Why a qcow2 image is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("it is qcow version {0}; versions 2 and 3 are supported")]
    Version(u32),
    #[error("it names a backing file; flatten it with `qemu-img convert`")]
    BackingFile,
    #[error("it keeps its data in another file; convert it with `qemu-img convert`")]
    ExternalData,
    #[error("its header extensions are longer than those of any known image")]
    Extensions,
    #[error("it is encrypted (method {0})")]
    Encrypted(u32),
    #[error("it is marked as corrupt; repair it with `qemu-img check -r`")]
    Corrupt,
    #[error("it needs features that are not known here (bits {0:#x})")]
    UnknownFeatures(u64),
    #[error("it uses compression type {0}, which is not known here")]
    Compression(u8),
    #[error("its clusters of 2^{0} bytes are out of range")]
    ClusterBits(u32),
    #[error("its virtual size of {0} bytes is out of range")]
    VirtualSize(u64),
}

impl Header {
    /// The disk's size for the guest, if nothing in the header speaks against its use.
    pub fn check(&self) -> Result<u64, Fault> {
        if !(2..=3).contains(&self.version) {
            return Err(Fault::Version(self.version));
        }
        if self.backing_file_offset != 0 {
            return Err(Fault::BackingFile);
        }
        if self.incompatible & EXTERNAL_DATA != 0 || self.extensions == Extensions::DataFile {
            return Err(Fault::ExternalData);
        }
        if self.extensions == Extensions::OutOfSight {
            return Err(Fault::Extensions);
        }
        if self.crypt_method != 0 {
            return Err(Fault::Encrypted(self.crypt_method));
        }
        if self.incompatible & CORRUPT != 0 {
            return Err(Fault::Corrupt);
        }
        let unknown = self.incompatible & !(HARMLESS | CORRUPT | EXTERNAL_DATA);
        if unknown != 0 {
            return Err(Fault::UnknownFeatures(unknown));
        }
        // 0 is deflate, 1 is zstd
        if self.compression > 1 {
            return Err(Fault::Compression(self.compression));
        }
        if !(9..=21).contains(&self.cluster_bits) {
            return Err(Fault::ClusterBits(self.cluster_bits));
        }
        if self.virtual_size == 0 || self.virtual_size > MAX_VIRTUAL_SIZE {
            return Err(Fault::VirtualSize(self.virtual_size));
        }
        Ok(self.virtual_size)
    }

    fn parse(head: &[u8]) -> Option<Self> {
        let version = be32(head, 4)?;
        if head.len() < V2_HEADER {
            return None;
        }
        let mut header = Self {
            version,
            backing_file_offset: be64(head, 8)?,
            cluster_bits: be32(head, 20)?,
            virtual_size: be64(head, 24)?,
            crypt_method: be32(head, 32)?,
            incompatible: 0,
            compression: 0,
            extensions: Extensions::Harmless,
        };
        let mut length = V2_HEADER;
        if version >= 3 {
            header.incompatible = be64(head, 72)?;
            length = usize::try_from(be32(head, 100)?).unwrap_or(usize::MAX);
            // the compression type came after the first version 3 headers, which end before it
            if length > V3_HEADER {
                header.compression = *head.get(V3_HEADER)?;
            }
        }
        header.extensions = extensions(head, length, header.cluster_bits);
        Some(header)
    }
}

/// Extensions lie one behind the other from the end of the header to the end of its cluster: type,
/// length, and content that is padded to 8 bytes.
fn extensions(head: &[u8], mut at: usize, cluster_bits: u32) -> Extensions {
    let cluster = 1_usize.checked_shl(cluster_bits).unwrap_or(usize::MAX);
    while at.saturating_add(8) <= cluster {
        let (Some(kind), Some(length)) = (be32(head, at), be32(head, at + 4)) else {
            // all of a short image was looked at; QEMU refuses one that ends here
            return if head.len() < HEAD { Extensions::Harmless } else { Extensions::OutOfSight };
        };
        match kind {
            END => break,
            DATA_FILE_NAME => return Extensions::DataFile,
            _ => {}
        }
        let padded = usize::try_from(length).ok().and_then(|l| l.checked_next_multiple_of(8)).unwrap_or(usize::MAX);
        at = at.saturating_add(8).saturating_add(padded);
    }
    Extensions::Harmless
}

/// Tells what an image is from its first bytes: all of them, or [`HEAD`] at least.
pub fn sniff(head: &[u8]) -> Sniffed {
    if head.is_empty() {
        return Sniffed::Other(Kind::Empty);
    }
    if head.starts_with(MAGIC) {
        return Header::parse(head).map_or(Sniffed::Other(Kind::CutQcow2), Sniffed::Qcow2);
    }
    match other(head) {
        Some(kind) => Sniffed::Other(kind),
        None => Sniffed::Raw,
    }
}

fn other(head: &[u8]) -> Option<Kind> {
    const AT_START: [(&[u8], Kind); 12] = [
        (b"KDMV", Kind::Vmdk),
        (b"COWD", Kind::Vmdk),
        (b"# Disk DescriptorFile", Kind::Vmdk),
        (b"vhdxfile", Kind::Vhdx),
        (b"conectix", Kind::Vhd),
        (b"QED\0", Kind::Qed),
        (b"\x1f\x8b", Kind::Gzip),
        (b"\xfd7zXZ\0", Kind::Xz),
        (b"\x28\xb5\x2f\xfd", Kind::Zstd),
        (b"BZh", Kind::Bzip2),
        (b"PK\x03\x04", Kind::Zip),
        (b"<?xml", Kind::Xml),
    ];
    if let Some((_, kind)) = AT_START.iter().find(|(magic, _)| head.starts_with(magic)) {
        return Some(*kind);
    }
    if head.get(0x40..0x44) == Some(b"\x7f\x10\xda\xbe") {
        return Some(Kind::Vdi);
    }
    if head.get(257..262) == Some(b"ustar") {
        return Some(Kind::Tar);
    }
    let text = head.trim_ascii_start();
    let begins = |what: &[u8]| text.get(..what.len()).is_some_and(|t| t.eq_ignore_ascii_case(what));
    (begins(b"<!doctype html") || begins(b"<html")).then_some(Kind::Html)
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;
    use std::process::Command;

    fn header(edit: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let mut h = vec![0; 512];
        h[..4].copy_from_slice(MAGIC);
        h[7] = 3;
        h[23] = 16;
        h[24..32].copy_from_slice(&(10u64 << 30).to_be_bytes());
        h[103] = 112;
        edit(&mut h);
        h
    }

    fn verdict(head: &[u8]) -> Result<u64, Fault> {
        match sniff(head) {
            Sniffed::Qcow2(h) => h.check(),
            other => panic!("not taken as qcow2: {other:?}"),
        }
    }

    #[rstest]
    #[case::plain(|_: &mut [u8]| (), Ok(10 << 30))]
    #[case::dirty_and_extended(|h: &mut [u8]| h[79] = 0b10001, Ok(10 << 30))]
    #[case::zstd(|h: &mut [u8]| { h[79] = 0b1000; h[104] = 1 }, Ok(10 << 30))]
    #[case::backing(|h: &mut [u8]| h[15] = 1, Err(Fault::BackingFile))]
    #[case::external(|h: &mut [u8]| h[79] = 0b100, Err(Fault::ExternalData))]
    #[case::external_unannounced(|h: &mut [u8]| h[112..116].copy_from_slice(b"DATA"), Err(Fault::ExternalData))]
    #[case::external_behind_another(|h: &mut [u8]| { h[112..120].copy_from_slice(b"xxxx\0\0\0\x03"); h[128..132].copy_from_slice(b"DATA") },
        Err(Fault::ExternalData))]
    #[case::external_behind_the_end(|h: &mut [u8]| h[120..124].copy_from_slice(b"DATA"), Ok(10 << 30))]
    #[case::external_in_version_2(|h: &mut [u8]| { h[7] = 2; h[72..76].copy_from_slice(b"DATA") }, Err(Fault::ExternalData))]
    #[case::external_behind_a_long_header(|h: &mut [u8]| { h[103] = 200; h[200..204].copy_from_slice(b"DATA") }, Err(Fault::ExternalData))]
    #[case::luks(|h: &mut [u8]| h[35] = 2, Err(Fault::Encrypted(2)))]
    #[case::corrupt(|h: &mut [u8]| h[79] = 0b10, Err(Fault::Corrupt))]
    #[case::unknown(|h: &mut [u8]| h[78] = 1, Err(Fault::UnknownFeatures(256)))]
    #[case::compression(|h: &mut [u8]| h[104] = 9, Err(Fault::Compression(9)))]
    #[case::version(|h: &mut [u8]| h[7] = 1, Err(Fault::Version(1)))]
    #[case::clusters(|h: &mut [u8]| h[23] = 63, Err(Fault::ClusterBits(63)))]
    #[case::nothing(|h: &mut [u8]| h[24..32].fill(0), Err(Fault::VirtualSize(0)))]
    #[case::huge(|h: &mut [u8]| h[24..32].fill(0xff), Err(Fault::VirtualSize(u64::MAX)))]
    fn a_header_is_used_only_if_all_of_it_is_harmless(#[case] edit: fn(&mut [u8]), #[case] expected: Result<u64, Fault>) {
        assert_eq!(verdict(&header(edit)), expected);
    }

    #[test]
    fn extensions_that_nobody_has_looked_at_are_not_trusted() {
        let mut head = header(|h| {
            h[23] = 21;
            h[112..120].copy_from_slice(&[1, 2, 3, 4, 0, 1, 0, 0]);
        });
        head.resize(HEAD, 0);
        assert_eq!(verdict(&head), Err(Fault::Extensions));
        // nothing lies behind the cluster of the header
        head[23] = 16;
        assert_eq!(verdict(&head), Ok(10 << 30));
    }

    #[rstest]
    #[case(b"KDMV\x01\0\0\0", Kind::Vmdk)]
    #[case(b"vhdxfile....", Kind::Vhdx)]
    #[case(b"\x1f\x8b\x08\0", Kind::Gzip)]
    #[case(b"\xfd7zXZ\0\0", Kind::Xz)]
    #[case(b"\x28\xb5\x2f\xfd\x04", Kind::Zstd)]
    #[case(b"\r\n <!DOCTYPE HTML><html>", Kind::Html)]
    #[case(b"QFI\xfb\0\0\0\x03", Kind::CutQcow2)]
    #[case(b"", Kind::Empty)]
    fn what_is_no_disk_image_of_ours_is_named(#[case] head: &[u8], #[case] kind: Kind) {
        assert_eq!(sniff(head), Sniffed::Other(kind));
    }

    #[test]
    fn a_disk_with_a_boot_sector_is_raw() {
        let mut disk = vec![0; 512];
        disk[510..].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(sniff(&disk), Sniffed::Raw);
    }

    /// Images of the real tool; None with a printed reason where it is missing.
    fn made_by_qemu_img(args: &[&str]) -> Option<Vec<u8>> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("image");
        let raw = std::fs::File::create(dir.path().join("base.raw")).and_then(|f| f.set_len(1 << 20));
        raw.expect("a file in the temporary directory");
        let run = Command::new("qemu-img").current_dir(dir.path()).arg("create").args(args).output();
        match run {
            Ok(out) => assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr)),
            Err(e) => {
                eprintln!("skipped: qemu-img does not run: {e}");
                return None;
            }
        }
        let mut head = std::fs::read(path).expect("the image was made");
        head.truncate(HEAD);
        Some(head)
    }

    #[rstest]
    #[case::plain(&["-f", "qcow2", "image", "3G"], Ok(3 << 30))]
    #[case::version_2(&["-f", "qcow2", "-o", "compat=0.10", "image", "3G"], Ok(3 << 30))]
    #[case::zstd(&["-f", "qcow2", "-o", "compression_type=zstd,cluster_size=4096", "image", "3G"], Ok(3 << 30))]
    #[case::extended(&["-f", "qcow2", "-o", "extended_l2=on,cluster_size=128k", "image", "3G"], Ok(3 << 30))]
    #[case::backing(&["-f", "qcow2", "-b", "base.raw", "-F", "raw", "image"], Err(Fault::BackingFile))]
    #[case::external(&["-f", "qcow2", "-o", "data_file=data.raw", "image", "1M"], Err(Fault::ExternalData))]
    #[case::aes(&["-f", "qcow2", "--object", "secret,id=s,data=abc", "-o", "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10",
        "image", "1M"], Err(Fault::Encrypted(2)))]
    fn images_of_qemu_img_are_read_right(#[case] args: &[&str], #[case] expected: Result<u64, Fault>) {
        if let Some(head) = made_by_qemu_img(args) {
            assert_eq!(verdict(&head), expected);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), magic in any::<bool>()) {
            let mut bytes = bytes;
            if magic && bytes.len() >= 8 {
                bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
            }
            if let Sniffed::Qcow2(h) = sniff(&bytes) {
                let _ = h.check();
            }
        }
    }
}
