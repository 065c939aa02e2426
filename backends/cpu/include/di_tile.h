// Everything a printed tile program may call.
#ifndef DI_TILE_H
#define DI_TILE_H
#include "di_fetch.h"
#include "di_formats.h"
#include "di_pool.h"
#include "di_select.h"
#include "di_state.h"
#endif
