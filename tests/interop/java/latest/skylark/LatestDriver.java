package skylark;

/** Apache's newest Java client: what all versions can do ({@link Driver}), and what only this one can. */
public final class LatestDriver {
    public static void main(String[] argv) throws Exception {
        Commands commands = Driver.commands();
        commands.serve();
    }
}
