# shellcheck shell=bash
# The image cache and the HTTP server in front of it.

# Variants that go into providers.yaml when they are in the cache, and their format and firmware.
IMAGE_VARIANTS=(debian noagent baked dummy tiny tiny-raw big)
image_format() { case $1 in tiny-raw | big) echo raw ;; *) echo qcow2 ;; esac; }
image_firmware() { echo uefi; }

# image_path VARIANT: where that image lies or will lie. The hash covers everything that the content depends on, so a
# changed recipe is another file and an old one is never served by mistake.
image_path() {
    printf '%s/%s-%s.%s' "$LAB_IMAGES" "$1" "$(image_hash "$1")" "$(image_format "$1")"
}
image_hash() {
    local d=$LAB_ROOT/guest-image files
    case $1 in
        tiny | tiny-raw | big) files=("$d/blobs.sh") ;;
        *) files=("$d/recipe.sh") ;;
    esac
    { cat "${files[@]}"; echo "$1"; } | sha256sum | cut -c1-12
}

# --- image server -------------------------------------------------------------------------------------------------

image_server_answers() { curl -fsS -m 2 -o /dev/null "$LAB_HTTP_URL/ready"; }

image_server_up() {
    local ns=$LAB_RUN/ns d=$LAB_DATA/http
    mkdir -p "$ns" "$d" "$LAB_RUN/pid" "$LAB_IMAGES"
    # A mount namespace of its own only so that it can be found and ended like everything else of the lab.
    if ! ns_inode "$ns/mnt" >/dev/null; then
        mounted "$ns" || { mount --bind "$ns" "$ns" && mount --make-private "$ns"; }
        touch "$ns/mnt"
        unshare --mount="$ns/mnt" --propagation private -- sh -c "$LAB_FORGET_MOUNTS" 8>&- 9>&-
    fi
    cat >"$d/nginx.conf" <<CONF
$(nginx_preamble "$d")
http {
$(nginx_temp_paths "$d")
    log_format lab '\$time_iso8601 \$request_method \$request_uri \$status \$body_bytes_sent range=\$http_range if_range=\$http_if_range';
    access_log $LAB_DATA/http/access.log lab;
    default_type application/octet-stream;
    sendfile on;
    server {
        listen $LAB_HTTP_ADDR:$LAB_HTTP_PORT;
        location = /ready { access_log off; return 204; }
        location /images/ { alias $LAB_IMAGES/; autoindex on; }
        location /scratch/ { alias $LAB_DATA/scratch/; autoindex on; }
    }
}
CONF
    if ! recorded "$LAB_RUN/pid/http" >/dev/null; then
        daemon "$LAB_RUN/pid/http" "$d/error.log" \
            nsenter --mount="$ns/mnt" --wd=/ -- /usr/sbin/nginx -c "$d/nginx.conf"
    fi
    wait_for 10 "the image server" image_server_answers || { tail -3 "$d/error.log" >&2; die "the image server did not come up"; }
}
