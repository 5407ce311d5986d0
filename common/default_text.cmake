# cmake -DBIBLE=program -DTEXT=file -P default_text.cmake: writes the default text, unless it is there.
set(EXPECTED 4404412) # bytes

function(check_size file result)
    set(size 0)
    if(EXISTS "${file}")
        file(SIZE "${file}" size)
    endif()
    set(${result} ${size} PARENT_SCOPE)
endfunction()

check_size("${TEXT}" size)
if(size EQUAL EXPECTED)
    file(TOUCH_NOCREATE "${TEXT}") # made by another preset
    return()
endif()

# Two presets may be built at once: write beside it, under a name of our own, then rename.
string(RANDOM LENGTH 8 unique)
cmake_path(GET TEXT PARENT_PATH folder)
file(MAKE_DIRECTORY "${folder}")
execute_process(COMMAND "${BIBLE}" -f gen1:1-rev22:21
                INPUT_FILE /dev/null OUTPUT_FILE "${TEXT}.${unique}" RESULT_VARIABLE failed)
check_size("${TEXT}.${unique}" size)
if(failed OR size EQUAL 0)
    file(REMOVE "${TEXT}.${unique}")
    message(FATAL_ERROR "${BIBLE} -f gen1:1-rev22:21 failed (${failed}), ${size} bytes: "
                        "install the package bible-kjv again, or configure with -DSHARD_BIBLE=")
endif()
if(NOT size EQUAL EXPECTED)
    message(WARNING "${BIBLE} printed ${size} bytes, not ${EXPECTED}: another edition? Everything "
                    "works, but the losses are not those that the lessons print.")
endif()
file(RENAME "${TEXT}.${unique}" "${TEXT}")
