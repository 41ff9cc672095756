// The version of the library; setup.py reads it from here, the one place where it stands.
#pragma once

#define GRADCAST_VERSION "0.1.0"
