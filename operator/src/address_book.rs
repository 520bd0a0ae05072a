//! Which Proxy reports which address, to notice when two report the same: most often clones of one image that ask DHCP
//! under one identity. A CONNECT through such an address proves nothing about either.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;

/// A Proxy, as namespace/name.
pub type ProxyName = String;

#[derive(Debug, Default)]
struct Book {
    by_address: BTreeMap<(String, u16), BTreeSet<ProxyName>>,
    by_proxy: HashMap<ProxyName, (String, u16)>,
}

/// The addresses of all Proxies.
#[derive(Debug, Default)]
pub struct AddressBook(Mutex<Book>);

impl AddressBook {
    /// Notes the address of a Proxy, or that it has none. Returns those whose verdict may change with it: the Proxies
    /// that share the old or the new address.
    pub fn note(&self, proxy: &str, address: Option<(&str, u16)>) -> Vec<ProxyName> {
        let mut book = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let new = address.map(|(ip, port)| (ip.to_owned(), port));
        if book.by_proxy.get(proxy) == new.as_ref() {
            return Vec::new();
        }
        let mut others = BTreeSet::new();
        if let Some(old) = book.by_proxy.remove(proxy) {
            let now_empty = book.by_address.get_mut(&old).is_some_and(|sharers| {
                sharers.remove(proxy);
                others.extend(sharers.iter().cloned());
                sharers.is_empty()
            });
            if now_empty {
                book.by_address.remove(&old);
            }
        }
        if let Some(new) = new {
            let sharers = book.by_address.entry(new.clone()).or_default();
            others.extend(sharers.iter().cloned());
            sharers.insert(proxy.to_owned());
            book.by_proxy.insert(proxy.to_owned(), new);
        }
        others.into_iter().collect()
    }

    /// Another Proxy with the address of this one.
    #[must_use]
    pub fn shared_with(&self, proxy: &str) -> Option<ProxyName> {
        let book = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let address = book.by_proxy.get(proxy)?;
        book.by_address.get(address)?.iter().find(|other| *other != proxy).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_of_two_with_one_address_are_told_and_told_again_when_it_is_over() {
        let book = AddressBook::default();
        assert!(book.note("a", Some(("10.0.0.5", 3128))).is_empty());
        assert_eq!(book.note("b", Some(("10.0.0.5", 3128))), ["a"]);
        assert_eq!((book.shared_with("a").as_deref(), book.shared_with("b").as_deref()), (Some("b"), Some("a")));
        assert!(book.note("b", Some(("10.0.0.5", 3128))).is_empty(), "nothing new");
        assert_eq!(book.note("b", None), ["a"]);
        assert_eq!(book.shared_with("a"), None);
    }

    #[test]
    fn two_ports_of_one_address_are_two_proxies() {
        let book = AddressBook::default();
        book.note("a", Some(("10.0.0.5", 3128)));
        book.note("b", Some(("10.0.0.5", 3129)));
        assert_eq!(book.shared_with("a"), None);
    }
}
