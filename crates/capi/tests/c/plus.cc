// SPDX-License-Identifier: Apache-2.0 OR MIT
// The header from C++.
#include <tombolo.h>

int main()
{
    tombolo_channel *stream = nullptr;
    tombolo_options options{};
    options.size = sizeof options;
    return tombolo_stream_connect("nowhere", &options, &stream) == -22 && stream == nullptr ? 0 : 1;
}
