//! Patches: merge (RFC 7386), JSON (RFC 6902, the operations that clients use), and server-side apply as a merge.

use serde_json::Value;

/// `b` into `a`; a null removes.
pub(super) fn merge(a: &mut Value, b: &Value) {
    let Value::Object(new) = b else {
        *a = b.clone();
        return;
    };
    if !a.is_object() {
        *a = Value::Object(serde_json::Map::new());
    }
    let Value::Object(old) = a else { return };
    for (key, value) in new {
        if value.is_null() {
            old.remove(key);
        } else {
            merge(old.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// A JSON patch; the error says which operation failed.
pub(super) fn json(of: &mut Value, operations: &Value) -> Result<(), String> {
    for operation in operations.as_array().ok_or("a JSON patch is a list")? {
        let word = |name: &str| operation[name].as_str().unwrap_or_default().to_owned();
        let (op, path) = (word("op"), word("path"));
        let (parent, key) = path.rsplit_once('/').ok_or_else(|| format!("{path:?} is no path"))?;
        let key = key.replace("~1", "/").replace("~0", "~");
        let at = of.pointer(&path).cloned();
        match op.as_str() {
            "test" => {
                if at.unwrap_or(Value::Null) != operation["value"] {
                    return Err(format!("test of {path} failed"));
                }
            }
            "add" | "replace" | "remove" => match of.pointer_mut(parent) {
                Some(Value::Object(map)) if op == "remove" => {
                    map.remove(&key).ok_or_else(|| format!("{path} is not there"))?;
                }
                Some(Value::Object(map)) => {
                    map.insert(key, operation["value"].clone());
                }
                Some(Value::Array(list)) => {
                    let index = if key == "-" { list.len() } else { key.parse().map_err(|_| format!("{path} is no index"))? };
                    match op.as_str() {
                        "remove" if index < list.len() => drop(list.remove(index)),
                        "replace" if index < list.len() => list[index] = operation["value"].clone(),
                        "add" if index <= list.len() => list.insert(index, operation["value"].clone()),
                        _ => return Err(format!("{path} is out of range")),
                    }
                }
                _ => return Err(format!("{parent} is not there")),
            },
            other => return Err(format!("{other:?} is not served")),
        }
    }
    Ok(())
}
