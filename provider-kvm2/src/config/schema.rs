//! Every key of an entry's block, once: the reader refuses what is not here, the
//! environment overrides are resolved against it, and a test holds the table of
//! the documentation against it.

/// One key and what lies under it.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) shape: Shape,
}

#[derive(Debug)]
pub(super) enum Shape {
    /// A scalar or a list of scalars.
    Leaf,
    Block(&'static [Key]),
    /// A map from names that the file's author chooses to blocks.
    Catalogue(&'static [Key]),
    /// A list of blocks, each with a `name`.
    Named(&'static [Key]),
}

const fn leaf(name: &'static str) -> Key {
    Key { name, shape: Shape::Leaf }
}

/// The keys of the file itself.
pub(super) const ROOT: &[Key] = &[leaf("providers")];

/// The keys of an entry of type `kvm2`.
pub(super) const ENTRY: &[Key] = &[leaf("name"), leaf("type"), Key { name: "kvm2", shape: Shape::Block(BLOCK) }];

/// The keys of the `kvm2` block.
pub(super) const BLOCK: &[Key] = &[
    leaf("sshKeyFile"),
    leaf("knownHostsFile"),
    leaf("insecureIgnoreHostKey"),
    leaf("diskSizeGb"),
    leaf("vendorData"),
    leaf("installGuestAgent"),
    Key { name: "images", shape: Shape::Catalogue(IMAGE) },
    Key { name: "machineTypes", shape: Shape::Catalogue(MACHINE_TYPE) },
    Key { name: "hosts", shape: Shape::Named(HOST) },
    leaf("virtType"),
    leaf("cpuMode"),
    leaf("machine"),
    leaf("networkConfig"),
    leaf("poolReserveGiB"),
    leaf("maxImageGiB"),
    leaf("requireDigest"),
    Key { name: "urlPolicy", shape: Shape::Block(URL_POLICY) },
    Key { name: "budgets", shape: Shape::Block(BUDGETS) },
];

pub(super) const IMAGE: &[Key] = &[leaf("url"), leaf("sha256"), leaf("format"), leaf("firmware")];
pub(super) const MACHINE_TYPE: &[Key] = &[leaf("vcpus"), leaf("memoryMiB")];
pub(super) const HOST: &[Key] = &[leaf("name"), leaf("address"), leaf("user"), leaf("socket"), leaf("pool"), leaf("bridge")];
pub(super) const URL_POLICY: &[Key] = &[leaf("allowHttp"), leaf("allow")];
pub(super) const BUDGETS: &[Key] =
    &[leaf("dial"), leaf("call"), leaf("start"), leaf("allocate"), leaf("uploadSmall"), leaf("uploadImage"), leaf("settle")];

/// A name without case and punctuation: `diskSizeGb` and `DISK_SIZE_GB` are one.
pub(super) fn folded(name: &str) -> String {
    name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// The key that was probably meant by an unknown one.
pub(super) fn nearest<'a>(unknown: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let wanted = folded(unknown);
    // a third of the letters may differ: enough for a slip, too little for another word
    let limit = (wanted.chars().count() / 3).clamp(1, 3);
    known.map(|k| (distance(&wanted, &folded(k)), k)).filter(|(d, _)| *d <= limit).min_by_key(|(d, _)| *d).map(|(_, k)| k)
}

/// Levenshtein's distance. Long words are not compared: no key is that long.
fn distance(a: &str, b: &str) -> usize {
    const LONGEST: usize = 64;
    let b: Vec<char> = b.chars().take(LONGEST).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(LONGEST).enumerate() {
        let mut corner = i;
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = corner + usize::from(x != *y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> impl Iterator<Item = &'static str> {
        BLOCK.iter().map(|k| k.name)
    }

    #[test]
    fn a_slip_finds_its_key_and_another_word_finds_none() {
        assert_eq!(nearest("disk_size_gb", names()), Some("diskSizeGb"));
        assert_eq!(nearest("sshKeyfile", names()), Some("sshKeyFile"));
        assert_eq!(nearest("machineType", names()), Some("machineTypes"));
        assert_eq!(nearest("password", names()), None);
        assert_eq!(nearest("", names()), None);
    }

    #[test]
    fn keys_of_one_block_differ_even_when_folded() {
        fn check(keys: &[Key]) {
            let mut seen: Vec<String> = keys.iter().map(|k| folded(k.name)).collect();
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), keys.len());
            for key in keys {
                match key.shape {
                    Shape::Leaf => {}
                    Shape::Block(inner) | Shape::Catalogue(inner) | Shape::Named(inner) => check(inner),
                }
            }
        }
        check(ENTRY);
    }
}
