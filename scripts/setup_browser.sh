#!/usr/bin/env bash
# A Chromium for the tests of the page of a run (make test-browser). Installs nothing where there is one.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null || ! grep -qs '^ID=debian' /etc/os-release; then
  echo "There is no Chromium, and this script installs one as root on Debian only. Elsewhere install it yourself, so that" >&2
  echo "chromium, chromium-browser or google-chrome is on the PATH (Fedora: dnf install chromium; Arch: pacman -S chromium;" >&2
  echo "Ubuntu and macOS: https://www.google.com/chrome), then run make test-browser again." >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium
