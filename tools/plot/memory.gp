# Memory over time by category, stacked.
#
#     GNUPLOT_LIB=tools/plot gnuplot \
#         -e "out = 'memory.png'; file = 'memory.columns'; title = 'llama: memory by category'" tools/plot/memory.gp
#
# file  columns of tools/plot/memory_columns
# top   if given, the end of the axis in MB, so that two pictures can be compared
load "style.gp"
categories = "params grads optimizer activations comm workspace"
stats file using 1 nooutput
set title title
set xlabel "ms"
set ylabel "MB"
set xrange [STATS_min:STATS_max]
set yrange [0:*]
if (exists("top")) {
    set yrange [0:top]
}
set key outside right center Left reverse
plot for [c = words(categories):1:-1] file using 1:(column(c + 1)) with filledcurves y1=0 \
    lc rgb COLOR[c] title word(categories, c)
