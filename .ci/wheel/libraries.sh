#!/bin/sh
# The C++ libraries of lowbit-ckpt in a folder of their own, for a wheel: headers, and libdeflate and zstd as static
# libraries. The sources are those of Debian 12; each must have its digest.
#   .ci/wheel/libraries.sh PREFIX
# CC and AR: the compiler (cc) and the archiver (ar) of the target. MIRROR: where Debian's archive is.
set -eu
prefix=$1
mirror=${MIRROR:-http://deb.debian.org/debian/pool/main}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$prefix/include" "$prefix/lib"
prefix=$(cd "$prefix" && pwd)
cd "$work"

# source DIGEST PATH: fetches, checks and unpacks; the folder is `source`.
source() {
  file=${2##*/}
  curl -sSfL --retry 3 -o "$file" "$mirror/$2"
  echo "$1  $file" | sha256sum --check --quiet
  rm -rf source && mkdir source
  tar -xf "$file" -C source --strip-components=1
}

# library NAME FOLDERS: what is in C below the folders of `source`, in the same order on every machine. What nothing
# refers to is left out by the linker.
library() {
  name=$1
  shift
  (cd source && for file in $(find "$@" -name '*.c' | LC_ALL=C sort); do
    ${CC:-cc} -O2 -fPIC -DNDEBUG -DZSTD_DISABLE_ASM -ffunction-sections -fdata-sections -I. -c "$file" \
      -o "$(echo "$file" | tr / _).o"
  done)
  rm -f "$prefix/lib/$name.a"
  (export LC_ALL=C; ${AR:-ar} rcsD "$prefix/lib/$name.a" source/*.o)
}

source 8143d20b688e98ccce8e24562d3b68e5f47c12e896c42c7ca8553dbde5bed55d c/cli11/cli11_2.1.2+ds.orig.tar.xz
cp -r source/include/CLI "$prefix/include"
source 84ce1c2d0be3a9863935137969dcec6970125caac032f82474640bfc81463583 f/fmtlib/fmtlib_9.1.0+ds1.orig.tar.gz
cp -r source/include/fmt "$prefix/include"
source d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273 n/nlohmann-json3/nlohmann-json3_3.11.2.orig.tar.gz
cp -r source/include/nlohmann "$prefix/include"
source 3bb6b7d6f30c591dd65aaaff1c8b7a5b94d81687998ca9400082c739a690436c x/xxhash/xxhash_0.8.1.orig.tar.gz
cp source/xxhash.h "$prefix/include"
source 89e7df898c37c3427b0f39aadcf733731321a278771d20fc553f92da8d4808ac libd/libdeflate/libdeflate_1.14.orig.tar.gz
cp source/libdeflate.h "$prefix/include"
library libdeflate lib
source 8cf4bbb65e77ec348d052c8d6230eba66d435bddf64c8b5be2fcb16880c19953 libz/libzstd/libzstd_1.5.4+dfsg2.orig.tar.xz
cp source/lib/zstd.h source/lib/zstd_errors.h "$prefix/include"
library libzstd lib/common lib/decompress
