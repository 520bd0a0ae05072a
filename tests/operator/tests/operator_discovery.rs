//! What clients of discovery see.

use egress_operator::conditions::READY;
use operator_tests::rig::{SOON, TOKEN, answering_proxy, external, is};
use operator_tests::{ApiServer, Rig, Settings, SimProvider};
use reqwest::{Client, Method, Response, StatusCode};
use serde_json::{Value, json};

async fn call(rig: &Rig, method: Method, path: &str, body: Option<Value>) -> Response {
    let mut request = Client::new().request(method, format!("{}{path}", rig.discovery)).bearer_auth(TOKEN);
    if let Some(body) = body {
        request = request.header("content-type", "application/json").body(body.to_string());
    }
    request.send().await.expect("an answer")
}

async fn read(response: Response) -> Value {
    serde_json::from_slice(&response.bytes().await.expect("a body")).expect("JSON")
}

/// Three external proxies that are ready, and one that is not.
async fn with_proxies(settings: Settings) -> (Rig, tokio::task::JoinHandle<()>) {
    let rig = Rig::between(ApiServer::begin().await, SimProvider::default(), settings).await;
    let (port, proxy) = answering_proxy("200 OK").await;
    for n in 1..=3 {
        rig.apply(&format!("p{n}"), external(&format!("127.0.0.{n}"), port)).await;
    }
    rig.apply("dead", external("127.0.0.9", 1)).await;
    for n in 1..=3 {
        rig.until(&format!("p{n}"), "Ready", |p| is(p, READY)).await;
    }
    (rig, proxy)
}

/// The list as it is when the watch has told discovery what the test knows already.
async fn ready_list(rig: &Rig) -> (String, Value) {
    lab_tests::eventually("three are listed", SOON, || async {
        let response = call(rig, Method::GET, "/v1/proxies", None).await;
        let etag = response.headers()["etag"].to_str().expect("text").to_owned();
        let list = read(response).await;
        if list["items"].as_array().is_some_and(|items| items.len() == 3) { Ok((etag, list)) } else { Err(list.to_string()) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn only_ready_proxies_are_listed_with_an_etag_and_all_when_asked() {
    let (rig, proxy) = with_proxies(Settings::default()).await;
    let (etag, list) = ready_list(&rig).await;
    let names: Vec<_> = list["items"].as_array().expect("a list").iter().map(|i| i["name"].as_str().expect("a name").to_owned()).collect();
    assert_eq!(names, ["p1", "p2", "p3"]);
    let again = Client::new()
        .get(format!("{}/v1/proxies", rig.discovery))
        .bearer_auth(TOKEN)
        .header("if-none-match", &etag)
        .send()
        .await
        .expect("an answer");
    assert_eq!(again.status(), StatusCode::NOT_MODIFIED);
    let all = read(call(&rig, Method::GET, "/v1/proxies?all=true", None).await).await;
    assert_eq!(all["items"].as_array().map(Vec::len), Some(4));
    let odd = call(&rig, Method::GET, "/v1/proxies?colour=red", None).await;
    assert_eq!(odd.status(), StatusCode::BAD_REQUEST);
    assert_eq!(read(odd).await["error"]["code"], "QUERY_INVALID");
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_token_nobody_learns_anything() {
    let rig = Rig::start().await;
    for (method, path) in
        [(Method::GET, "/v1/proxies"), (Method::POST, "/v1/leases"), (Method::DELETE, "/v1/leases/x"), (Method::GET, "/v1/leases")]
    {
        let answer = Client::new().request(method, format!("{}{path}", rig.discovery)).send().await.expect("an answer");
        assert_eq!(
            (answer.status(), answer.headers()["www-authenticate"].to_str().expect("text")),
            (StatusCode::UNAUTHORIZED, "Bearer"),
            "{path}"
        );
    }
    let document = Client::new().get(format!("{}/openapi.json", rig.discovery)).send().await.expect("an answer");
    let document = read(document).await;
    assert_eq!(document["openapi"], "3.1.0");
    for path in ["/v1/proxies", "/v1/leases", "/v1/leases/{id}", "/v1/leases/{id}/renew"] {
        assert!(document["paths"][path].is_object(), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_are_fair_renewed_released_and_survive_the_operator() {
    let (mut rig, proxy) = with_proxies(Settings::default()).await;
    ready_list(&rig).await;
    let mut given = Vec::new();
    for n in 0..6 {
        let answer = call(&rig, Method::POST, "/v1/leases", Some(json!({ "client": format!("c{n}"), "ttlSeconds": 600 }))).await;
        assert_eq!(answer.status(), StatusCode::CREATED);
        given.push(read(answer).await);
    }
    for n in 1..=3 {
        assert_eq!(given.iter().filter(|g| g["proxy"]["name"] == format!("p{n}")).count(), 2, "each is given twice");
    }
    let id = given[0]["lease"]["id"].as_str().expect("an id").to_owned();
    let renewed = call(&rig, Method::POST, &format!("/v1/leases/{id}/renew"), Some(json!({ "ttlSeconds": 1200 }))).await;
    assert_eq!(renewed.status(), StatusCode::OK);
    rig.kill().await;
    let again = rig.again(Settings::default()).await;
    lab_tests::eventually("the leases are taken over", SOON, || async {
        let answer = call(&again, Method::GET, "/v1/leases", None).await;
        let list = read(answer).await;
        if list["items"].as_array().is_some_and(|l| l.len() == 6) { Ok(()) } else { Err(list.to_string()) }
    })
    .await;
    assert_eq!(call(&again, Method::DELETE, &format!("/v1/leases/{id}"), None).await.status(), StatusCode::NO_CONTENT);
    assert_eq!(
        call(&again, Method::DELETE, &format!("/v1/leases/{id}"), None).await.status(),
        StatusCode::NO_CONTENT,
        "giving back twice is no fault"
    );
    let gone = call(&again, Method::POST, &format!("/v1/leases/{id}/renew"), None).await;
    assert_eq!((gone.status(), read(gone).await["error"]["code"].as_str()), (StatusCode::NOT_FOUND, Some("LEASE_UNKNOWN")));
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_wishes_have_their_reason_and_none_ready_says_when_to_come_back() {
    let rig = Rig::start().await;
    lab_tests::eventually("the desk is open", SOON, || async {
        let answer = call(&rig, Method::GET, "/v1/leases", None).await;
        if answer.status() == StatusCode::OK { Ok(()) } else { Err(answer.status().to_string()) }
    })
    .await;
    for (body, code) in [
        (json!({}), "CLIENT_INVALID"),
        (json!({ "client": "c", "ttlSeconds": 1 }), "TTL_INVALID"),
        (json!({ "client": "c", "colour": "red" }), "BODY_INVALID"),
    ] {
        let answer = call(&rig, Method::POST, "/v1/leases", Some(body)).await;
        assert_eq!((answer.status(), read(answer).await["error"]["code"].as_str()), (StatusCode::BAD_REQUEST, Some(code)));
    }
    lab_tests::eventually("nothing is ready", SOON, || async {
        let answer = call(&rig, Method::POST, "/v1/leases", Some(json!({ "client": "c" }))).await;
        let retry = answer.headers().contains_key("retry-after");
        let (status, body) = (answer.status(), read(answer).await);
        if status == StatusCode::SERVICE_UNAVAILABLE && retry && body["error"]["code"] == "NONE_READY" {
            Ok(())
        } else {
            Err(body.to_string())
        }
    })
    .await;
    let metrics = reqwest::get(format!("{}/metrics", rig.ops)).await.expect("an answer").text().await.expect("text");
    assert!(metrics.contains("egress_operator_leader 1") && metrics.ends_with("# EOF\n"), "{metrics}");
}
