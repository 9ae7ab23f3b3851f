// SPDX-License-Identifier: Apache-2.0 OR MIT
// Both headers are C++ as well, and do not get into each other's way.
#include <libvchan.h>
#include <libxenvchan.h>

int main()
{
    libvchan_close(nullptr);
    libxenvchan_close(nullptr);
    return libvchan_is_open(nullptr) + libxenvchan_is_open(nullptr);
}
