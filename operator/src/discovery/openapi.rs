//! The OpenAPI document of discovery. Written by hand: it is small, and it is the promise to clients.

use serde_json::{Value, json};

/// OpenAPI 3.1.
#[must_use]
pub fn document() -> Value {
    let text = |description: &str| json!({ "type": "string", "description": description });
    let filter = |name: &str, description: &str| json!({ "name": name, "in": "query", "required": false, "description": description, "schema": { "type": "string" } });
    let error = |description: &str| json!({ "description": description, "content": { "application/json": { "schema": { "$ref": "#/components/schemas/Error" } } } });
    let answer = |description: &str, schema: &str| json!({ "description": description, "content": { "application/json": { "schema": { "$ref": format!("#/components/schemas/{schema}") } } } });
    let lease_id = json!({ "name": "id", "in": "path", "required": true, "schema": { "type": "string", "format": "uuid" } });
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Egress proxies: discovery",
            "version": "v1",
            "description": "Which proxies may be used, and leases of them. Every path but /openapi.json wants the bearer token."
        },
        "security": [{ "token": [] }],
        "paths": {
            "/openapi.json": { "get": { "operationId": "getOpenapi", "summary": "This document", "security": [], "responses": { "200": { "description": "This document", "content": { "application/json": {} } } } } },
            "/v1/proxies": { "get": {
                "operationId": "listProxies",
                "summary": "The proxies that fit, ordered by namespace and name",
                "parameters": [
                    filter("namespace", "Only of this namespace"), filter("provider", "Only of this provider"),
                    filter("zone", "Only in this zone"), filter("region", "Only in this region"),
                    { "name": "label", "in": "query", "required": false, "description": "Only with this label, as key=value; may be repeated", "schema": { "type": "array", "items": { "type": "string" } }, "explode": true },
                    { "name": "all", "in": "query", "required": false, "description": "true: also those that may not be used", "schema": { "type": "boolean", "default": false } },
                    { "name": "If-None-Match", "in": "header", "required": false, "description": "An ETag from before", "schema": { "type": "string" } }
                ],
                "responses": { "200": answer("The proxies, with an ETag", "ProxyList"), "304": { "description": "Nothing has changed since that ETag" }, "400": error("QUERY_INVALID"), "401": error("UNAUTHORIZED") }
            } },
            "/v1/leases": {
                "get": { "operationId": "listLeases", "summary": "Leases that run", "responses": { "200": answer("The leases, oldest first", "LeaseList"), "401": error("UNAUTHORIZED"), "503": error("NOT_LEADER") } },
                "post": {
                    "operationId": "acquireLease",
                    "summary": "Gives a ready proxy for a time: the one with the fewest leases that has waited longest",
                    "requestBody": { "required": true, "content": { "application/json": { "schema": { "$ref": "#/components/schemas/LeaseRequest" } } } },
                    "responses": { "201": answer("The lease and its proxy", "LeaseGiven"), "400": error("BODY_INVALID, CLIENT_INVALID or TTL_INVALID"), "401": error("UNAUTHORIZED"), "429": error("TOO_MANY_LEASES"), "503": error("NONE_READY, NOT_LEADER or STORE_UNAVAILABLE: come back after Retry-After") }
                }
            },
            "/v1/leases/{id}": { "delete": { "operationId": "releaseLease", "summary": "Gives a lease back; one that is not there is back already", "parameters": [lease_id], "responses": { "204": { "description": "It is back" }, "401": error("UNAUTHORIZED"), "503": error("NOT_LEADER or STORE_UNAVAILABLE") } } },
            "/v1/leases/{id}/renew": { "post": {
                "operationId": "renewLease",
                "summary": "Makes a lease last longer",
                "parameters": [lease_id],
                "requestBody": { "required": false, "content": { "application/json": { "schema": { "type": "object", "properties": { "ttlSeconds": { "type": "integer", "minimum": 5, "maximum": 86400, "default": 300 } }, "additionalProperties": false } } } },
                "responses": { "200": answer("The lease", "Lease"), "400": error("BODY_INVALID or TTL_INVALID"), "401": error("UNAUTHORIZED"), "404": error("LEASE_UNKNOWN: it has ended, acquire another"), "409": error("PROXY_NOT_READY: release it and acquire another"), "503": error("NOT_LEADER or STORE_UNAVAILABLE") }
            } }
        },
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "schemas": {
                "Proxy": { "type": "object", "required": ["namespace", "name", "port", "ready", "reason"], "properties": {
                    "namespace": text("Namespace of its Proxy"), "name": text("Name of its Proxy"), "address": text("IP address or DNS name; absent while it has none"),
                    "port": { "type": "integer", "minimum": 1, "maximum": 65535 }, "ready": { "type": "boolean", "description": "Whether it may be used" },
                    "reason": text("Why, in a word"), "provider": text("Its provider; absent for an external one"), "zone": text("Its zone, as placed"), "region": text("Its region, as placed"),
                    "labels": { "type": "object", "additionalProperties": { "type": "string" } } } },
                "ProxyList": { "type": "object", "required": ["items"], "properties": { "items": { "type": "array", "items": { "$ref": "#/components/schemas/Proxy" } } } },
                "Lease": { "type": "object", "required": ["id", "client", "proxy", "expiresAt"], "properties": {
                    "id": { "type": "string", "format": "uuid" }, "client": text("Who has it, as told"), "proxy": text("namespace/name of its Proxy"),
                    "expiresAt": { "type": "string", "format": "date-time" } } },
                "LeaseList": { "type": "object", "required": ["items"], "properties": { "items": { "type": "array", "items": { "$ref": "#/components/schemas/Lease" } } } },
                "LeaseGiven": { "type": "object", "required": ["lease", "proxy"], "properties": { "lease": { "$ref": "#/components/schemas/Lease" }, "proxy": { "$ref": "#/components/schemas/Proxy" } } },
                "LeaseRequest": { "type": "object", "required": ["client"], "additionalProperties": false, "properties": {
                    "client": { "type": "string", "minLength": 1, "maxLength": 253, "description": "Who asks" },
                    "ttlSeconds": { "type": "integer", "minimum": 5, "maximum": 86400, "default": 300 },
                    "namespace": text("Only of this namespace"), "provider": text("Only of this provider"), "zone": text("Only in this zone"), "region": text("Only in this region"),
                    "labels": { "type": "object", "additionalProperties": { "type": "string" }, "description": "Only with all of these labels" } } },
                "Error": { "type": "object", "required": ["error"], "properties": { "error": { "type": "object", "required": ["code", "message"], "properties": { "code": text("For programs"), "message": text("For people") } } } }
            }
        }
    })
}
